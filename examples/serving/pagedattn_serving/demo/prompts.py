"""The demo's prompts: beginnings of topics of Python's documentation, of very different lengths.

Lines break where the documentation breaks them, since the shipped model was trained on that text.
"""

PROMPTS = (
    "The ",
    "There are three basic sequence types: lists, tuples, and range\nobjects.",
    "Yield expressions",
    "A Python program is constructed from code blocks. A *block* is a piece\n"
    "of Python program text that is executed as a unit. The following are\n"
    "blocks: a module, a function body, and a class definition. Each\n"
    "command typed interactively is a block.  A script file (a file given\n"
    "as standard input to the interpreter or specified as a command line\n"
    "argument to the interpreter)",
    'The "with" statement is used to',
    "Lambda expressions (sometimes called lambda forms) are used to create\nanonymous functions.",
    "Classes without an inheritance list",
    'The module "pdb" defines an interactive source code debugger for\n'
    "Python programs.  It supports setting (conditional) breakpoints and\n"
    "single stepping",
    "Name resolution of free variables occurs",
    'A "break" statement executed',
    "Exceptions are a means of breaking out of the normal flow of control\n"
    "of a code block in order to handle errors or other exceptional\n"
    "conditions.  An exception is *raised* at the point where the error is\n"
    "detected; it may be *handled* by the surrounding code block or by any\n"
    "code block that",
    '"pass" is a null operation — when it is executed,',
    'The "global" statement is a declaration',
    "Every object has an identity, a type and a value.",
    "Modules are a basic organizational unit of Python code",
    "By default, an object is considered true unless its class defines\n"
    'either a "__bool__()" method that returns',
    "The following constructs bind names:\n",
    'The "for" statement is used to iterate over the elements of a sequence\n'
    "(such as a string, tuple or list) or other iterable object:\n",
    "Called to create a new instance of class *cls*.",
    "A *mapping* object maps *hashable* values to arbitrary objects.\n"
    "Mappings are mutable objects.  There is currently only one standard\n"
    "mapping type,",
)
