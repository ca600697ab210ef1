"""The Triton kernels and the arithmetic of their launches; no framework is imported here.

`attention` finds the tile of each program and `tile` computes it: by `online_softmax`, step by step
over the keys that `pages` reads. `merge` joins the partial results of split keys. How they are
started follows from shapes: `programs` and `tiling` say how much each program computes, `launch`
with which of the `arguments`.
`pagedattn.backends.triton` launches them from JAX, `pagedattn_torch.backends.triton` from torch.
"""
