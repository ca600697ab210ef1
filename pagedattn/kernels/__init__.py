"""The Triton kernels and the arithmetic of their launches; no framework is imported here.

`attention` computes attention over the pages, `merge` joins the partial results of split keys, and
`launch` decides from shapes how both are started. `pagedattn.backends.triton` launches them from
JAX, `pagedattn_torch.backends.triton` from torch.
"""
