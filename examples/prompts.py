"""What the demo asks: beginnings of Python's documentation, from a few bytes to a few hundred.

Lines break where the documentation breaks them, for that is what the shipped model has read.
"""

PROMPTS = (
    "The ",
    "Slicings\n",
    "Yield expressions",
    "Strings are immutable",
    'The "with" statement is used to',
    "Classes without an inheritance list",
    'The "global" statement is a declaration',
    "Name resolution of free variables occurs",
    "A dictionary’s keys are *almost* arbitrary",
    '"pass" is a null operation — when it is executed,',
    'The "for" statement is used to iterate over the elements',
    "There are three basic sequence types: lists, tuples, and range\nobjects.",
    "Assert statements are a convenient way to insert debugging assertions\ninto a program:\n",
    "Lambda expressions (sometimes called lambda forms) are used to create\nanonymous functions.",
    "By default, an object is considered true unless its class defines\n"
    'either a "__bool__()" method that returns',
    'The module "pdb" defines an interactive source code debugger for\n'
    "Python programs.  It supports setting (conditional) breakpoints and\n"
    "single stepping",
    "Unlike C, all comparison operations in Python have the same priority,\n"
    "which is lower than that of any arithmetic, shifting or bitwise\n"
    'operation.  Also unlike C, expressions like "a < b < c"',
    "Every object has an identity, a type and a value.  An object’s\n"
    "*identity* never changes once it has been created; you may think of it\n"
    'as the object’s address in memory.  The ‘"is"’ operator compares',
    "Exceptions are a means of breaking out of the normal flow of control\n"
    "of a code block in order to handle errors or other exceptional\n"
    "conditions.  An exception is *raised* at the point where the error is\n"
    "detected; it may be *handled* by the surrounding code block or by any\n"
    "code block that",
    "A Python program is constructed from code blocks. A *block* is a piece\n"
    "of Python program text that is executed as a unit. The following are\n"
    "blocks: a module, a function body, and a class definition. Each\n"
    "command typed interactively is a block.  A script file (a file given\n"
    "as standard input to the interpreter or specified as a command line\n"
    "argument to the interpreter)",
)
