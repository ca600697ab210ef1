"""Why the ipex backend guards its masks: soft caps, windows and ALiBi by the raw operators.

Each test holds for release 2.8; one that turns red says that its guard can go.
"""

import math

import pytest

torch = pytest.importorskip("torch")

from ipex_raw import CLOSE, case_of, decode, error, every_operator, expected, varlen


def test_the_computation_that_results_are_compared_with_agrees():
    case = case_of([40, 1, 300])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    assert error(decode(case), expected(case)) < CLOSE
    assert error(decode(case, window_size=5), expected(case, window=5)) < CLOSE
    assert error(decode(case, softcap=2.0), expected(case, cap=2.0)) < CLOSE
    assert error(decode(case, alibi_slopes=slopes), expected(case, slopes=slopes)) < CLOSE
    case = case_of([40, 7, 300], [3, 7, 100])
    assert error(varlen(case), expected(case)) < CLOSE
    assert error(varlen(case, window_size_left=4), expected(case, window=5)) < CLOSE
    assert error(varlen(case, softcap=2.0), expected(case, cap=2.0)) < CLOSE


@every_operator
def test_soft_cap_zero_weighs_every_token_the_same(operator):
    case = case_of([16])
    mean = case.value[0].double().mean(1).repeat_interleave(2, 0)
    assert error(operator(case, softcap=0.0), mean[None]) < CLOSE
    assert error(expected(case), mean[None]) > 0.1


@every_operator
def test_a_negative_soft_cap_other_than_minus_one_caps(operator):
    case = case_of([16])
    assert error(operator(case, softcap=-2.0), expected(case, cap=2.0)) < CLOSE


@every_operator
def test_soft_cap_none_raises(operator):
    with pytest.raises((TypeError, RuntimeError)):
        operator(case_of([16]), softcap=None)


def test_varlen_window_of_one_token_is_unlimited():
    case = case_of([16], [4])
    out = varlen(case, window_size_left=0)
    assert error(out, expected(case)) < CLOSE
    assert error(out, expected(case, window=1)) > 0.1


def test_windowed_decode_of_very_negative_logits_is_zero():
    case = case_of([300], heads=1, kv_heads=1)
    case = case.swap(query=torch.full_like(case.query, -100.0), key=torch.ones_like(case.key))
    assert error(decode(case), expected(case)) < CLOSE  # all logits are -400
    assert decode(case, window_size=4).count_nonzero() == 0
    assert expected(case, window=4).abs().max() > 0.1


WINDOWS = {"decode": (decode, {"window_size": 4}), "varlen": (varlen, {"window_size_left": 3})}


@pytest.mark.parametrize(("operator", "window"), WINDOWS.values(), ids=WINDOWS)
def test_nan_behind_the_window_shows(operator, window):
    case = case_of([20])
    case.value[case.tables[0, 0], :, 0] = math.nan
    assert operator(case, **window).isnan().all()


@every_operator
def test_nan_after_the_last_token_does_not_show(operator):
    case = case_of([20])
    for plane in (case.key, case.value):
        plane[case.tables[0, 1], :, 4:] = math.nan
    assert operator(case).isfinite().all()


def test_varlen_with_alibi_raises():
    with pytest.raises(RuntimeError, match="alibi_slopes is not supported"):
        varlen(case_of([16], [2]), alibi_slopes=torch.ones(4))


def test_windowed_decode_with_soft_cap_raises():
    with pytest.raises(RuntimeError):
        decode(case_of([16]), window_size=4, softcap=30.0)


def test_slopes_other_than_float32_raise():
    with pytest.raises(RuntimeError, match="expected scalar type Float"):
        decode(case_of([16]), alibi_slopes=torch.ones(4, dtype=torch.float64))
