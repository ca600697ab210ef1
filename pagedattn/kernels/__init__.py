"""The Triton kernels and the arithmetic of their launches; no framework is imported here.

`attention` computes attention over the pages, `merge` joins what splits of the keys gave, `launch`
decides from shapes how both are started. The launchers are `pagedattn.backends.triton` for JAX and
`pagedattn_torch.triton` for torch.
"""
