"""An extension of griffe: the docstrings' examples as code, their fields as a list."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
FIELDS = re.compile(r"^Fields[^\n:]*:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Markdown takes a leading `>>>` for a quotation, and griffe knows no section of fields."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            text = FIELDS.sub("Attributes:", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda code: f"```pycon\n{code[0]}\n```", text)
