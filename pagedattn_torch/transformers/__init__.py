"""transformers' models on this library's attention, and its continuous batching in place.

pagedattn_torch.transformers.register()
model.set_attn_implementation("pagedattn")   # then model.generate(...) as always

pagedattn_torch.transformers.use_pages(model)
model.generate_batch(prompts)                # reads transformers' own pages, and copies none
"""

try:
    import transformers as _transformers  # noqa: F401  (is it installed?)
except ImportError as error:
    from pagedattn import BackendUnavailableError

    raise BackendUnavailableError(
        "pagedattn_torch.transformers needs transformers, which is not installed: "
        "pip install 'transformers>=5'"
    ) from error

from .interface import register, use_pages

__all__ = ["register", "use_pages"]
