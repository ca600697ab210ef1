"""transformers' models on this library's attention, and its continuous batching in place.

pagedattn_torch.transformers.use(model)
model.generate(...)                          # as always

pagedattn_torch.transformers.use_pages(model)
model.generate_batch(prompts)                # reads transformers' own pages, and copies none
"""

from .requirements import require_version

require_version("5.4", __name__)  # older ones ask for masks in another way

from .interface import register, use, use_pages  # noqa: E402

__all__ = ["register", "use", "use_pages"]
