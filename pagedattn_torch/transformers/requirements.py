"""What must hold before: transformers' version, and that a model asks it for its attention."""

from pagedattn import BackendUnavailableError, UnsupportedError

try:
    import transformers
    from packaging.version import Version
except ImportError as error:
    raise BackendUnavailableError(
        f"pagedattn_torch.transformers needs transformers, which does not import ({error}): "
        "pip install 'transformers>=5.4'"
    ) from error


def require_version(least: str, name: str) -> None:
    """Raises BackendUnavailableError if transformers is older than `name` needs it."""
    if Version(transformers.__version__) < Version(least):
        raise BackendUnavailableError(
            f"{name} needs transformers {least} or newer, got {transformers.__version__}: "
            f"pip install 'transformers>={least}'"
        )


def require_interface(model: "transformers.PreTrainedModel") -> None:
    """Raises UnsupportedError if part of a model computes its attention by itself."""
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    alone = {type(part).__name__ for part in parts if not part._can_set_attn_implementation()}
    if alone:
        raise UnsupportedError(
            f"{', '.join(sorted(alone))}: it computes its attention by itself, and does not ask "
            "transformers' AttentionInterface for it (as Falcon, Bloom, MPT and GPT-J do not), so "
            "pagedattn cannot run it"
        )
