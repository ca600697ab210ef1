"""The comparison of attention with and without a shared prefix."""

import shared_prefix


def test_both_programs_run_and_agree(capsys):
    assert shared_prefix.main(num_seqs=3, prefix=32, suffix=16) < 0.02  # of values near 1, bfloat16
    printed = capsys.readouterr().out
    assert "3 sequences over 32 shared tokens" in printed
    assert "cascade_attention" in printed


def test_the_shared_blocks_are_those_of_the_prefix():
    _, _, batch = shared_prefix.step(3, 64, 32)
    prefix, rest = shared_prefix.pa.split_prefix(batch)
    assert prefix.seq_lens.tolist() == [64]
    assert rest.seq_lens.tolist() == [32] * 3
