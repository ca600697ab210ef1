"""An engine behind HTTP, in the form of OpenAI's completions and chat completions."""
