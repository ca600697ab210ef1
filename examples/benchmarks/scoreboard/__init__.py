"""Which calls other people's kernels compute, and whether what they give is right.

    python -m benchmarks.scoreboard --json docs/results/scoreboard.json

asks every peer that is installed for every cell that its documentation says it takes, holds the
answers to `pagedattn.testing`'s oracle and precision rule, and adds them to the file, in which the
answers of other machines stay. `docs/scoreboard.md` is written from that file: `--page`.

- cells.py: the cells, each a `Problem`.
- peer.py: what a peer is; those are in dense.py, pallas.py, vllm_cpu.py, flash.py, flashinfer.py
  and ours.py.
- ask.py: a peer's answers, in a process of its own, since some calls end a process.
- page.py: the page.
"""
