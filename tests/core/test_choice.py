"""How a backend is chosen, refused or missed, and what check_backend holds it to."""

import dataclasses
import sys
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import REFUSING, assert_words, good_call
from forked import run_forked
from pagedattn_interop import to_torch

import pagedattn_torch
from pagedattn import (
    AttentionSpec,
    Backend,
    BackendUnavailableError,
    InvalidInputError,
    UnsupportedError,
    attention_bias,
    available_backends,
    explain,
    init_kv_cache,
    make_batch,
    paged_attention,
    select_backend,
)
from pagedattn._dispatch import registry
from pagedattn._dispatch.registry import Framework, can_load
from pagedattn.backends import xla
from pagedattn.testing import batch_of, cache_of, harness, random_problem, running


def test_unknown_backends():
    with pytest.raises(BackendUnavailableError) as error:
        paged_attention(*good_call(), backend="flash9")
    assert_words(error, ["'flash9'", "xla", "sdpa", "pagedattn.backends"])
    with pytest.raises(BackendUnavailableError, match="flash9"):
        pagedattn_torch.paged_attention(
            *to_torch(good_call()[:2], copy=True), *good_call()[2:], backend="flash9"
        )


def test_available_backends():
    assert {"xla", "sdpa"} <= set(available_backends())
    assert all(isinstance(name, str) for name in available_backends())


def test_explain_names_every_backend():
    reasons = explain(*good_call())
    assert reasons.keys() >= {"xla", "sdpa"}
    assert reasons["xla"] == reasons["sdpa"] == []


def test_explain_rejects_what_no_backend_could_run():
    query, *rest = good_call()
    with pytest.raises(InvalidInputError, match="num_heads"):
        explain(query[:, :3], *rest)


NO_TORCH = """
import sys
from importlib.metadata import EntryPoint

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NoTorch())
import jax
import jax.numpy as jnp
jax.config.update("jax_default_device", jax.devices("cpu")[0])  # on a GPU others are taken first
import pagedattn
batch = pagedattn.make_batch([1], [0], [[0]], block_size=4)
cache = pagedattn.init_kv_cache(1, 4, 1, 8)
query = jnp.ones((1, 1, 8), jnp.bfloat16)
assert "xla" in pagedattn.available_backends()
assert "sdpa" not in pagedattn.available_backends()
assert pagedattn.select_backend(query, cache, batch) in ("numba", "xla")
assert pagedattn.paged_attention(query, cache, batch, backend="xla").shape == query.shape
reasons = pagedattn.explain(query, cache, batch)["sdpa"]
assert len(reasons) == 1, reasons
print(reasons[0])
for call in (
    lambda: pagedattn.paged_attention(query, cache, batch, backend="sdpa"),
    lambda: __import__("pagedattn_interop"),
):
    try:
        call()
    except pagedattn.BackendUnavailableError as error:
        print(error)
"""


@pytest.mark.parametrize("blocked", [{"torch"}, {"jax_tvm_ffi", "tvm_ffi"}])
def test_a_missing_package_is_named_with_its_cure(blocked):
    """A process that cannot import a package: xla serves, sdpa says what to install."""
    code = NO_TORCH.format(blocked=blocked)
    done = run_forked(code, "jax.numpy")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    for line in lines:
        assert "pip install 'pagedattn[torch]'" in line


NOTHING = """
import sys
sys.modules.update(dict.fromkeys(
    "torch numba llvmlite triton jax_tvm_ffi intel_extension_for_pytorch flash_attn".split()
))
from pagedattn._dispatch import registry
for name in registry.BUILT_IN:
    print(name, registry.tried(name, registry.Framework.JAX))
"""


def test_every_backend_without_its_packages_names_one_and_its_extra():
    lines = run_forked(NOTHING, "jax.numpy").stdout.splitlines()
    said = {line.split()[0]: line for line in lines}
    assert said.keys() == registry.BUILT_IN.keys()
    for name, where in registry.BUILT_IN.items():
        if where.extra:
            assert "is not installed" in said[name]
            assert f"pip install 'pagedattn[{where.extra}]'" in said[name]
    assert "numba is not installed" in said["numba"]


# What is taken on a CPU for a small call.
FIRST = "numba" if can_load("numba") else "xla"


PICKY = """
import jax.numpy as jnp
from pagedattn import Backend
from pagedattn.backends import xla

def run(call, query, cache, batch, **options):
    if call.num_tokens == 1:
        return jnp.full_like(query, 7.0), None
    return xla.run(call, query, cache, batch, **options)

BACKEND = Backend("picky", xla.SUPPORTS - {"logits_soft_cap"}, run, before=BEFORE)
"""


@pytest.fixture
def install_picky(tmp_path, monkeypatch):
    """Installs a backend of someone else's, whose `before` is given, beside the built-in ones."""

    def install(before):
        site = tmp_path / "picky-1.0.dist-info"
        site.mkdir()
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
        (site / "entry_points.txt").write_text("[pagedattn.backends]\npicky = picky:BACKEND\n")
        (tmp_path / "picky.py").write_text(PICKY.replace("BEFORE", repr(before)))
        monkeypatch.syspath_prepend(tmp_path)
        forget_third_parties()

    yield install
    monkeypatch.undo()
    sys.modules.pop("picky", None)
    forget_third_parties()


def forget_third_parties():
    registry._third_parties.cache_clear()
    registry.tried.cache_clear()


def small_call():
    batch = make_batch([1], [0], [[0]], block_size=4)
    return jnp.ones((1, 1, 8), jnp.bfloat16), init_kv_cache(1, 4, 1, 8), batch


@pytest.mark.usefixtures("on_cpu")  # where FIRST is what is taken
@pytest.mark.parametrize("before", [None, FIRST, "nobody"])
def test_a_backend_of_someone_elses_is_found_by_its_entry_point(install_picky, before):
    """It is chosen only where it stands before the others; by its name it runs."""
    install_picky(before)
    assert select_backend(*small_call()) == ("picky" if before == FIRST else FIRST)
    assert float(paged_attention(*small_call(), backend="picky")[0, 0, 0]) == 7.0


@pytest.mark.usefixtures("on_cpu")
def test_a_refusal_names_the_feature_and_does_not_fall_back(install_picky, monkeypatch):
    install_picky(None)
    capped = AttentionSpec(logits_soft_cap=1.0)
    with pytest.raises(UnsupportedError, match=r"picky(.|\n)*logits_soft_cap"):
        paged_attention(*small_call(), capped, backend="picky")
    assert "logits_soft_cap" in explain(*small_call(), capped)["picky"][0]
    monkeypatch.setattr(harness, "PHASES", {"mixed": harness.PHASES["mixed"]})
    keep(monkeypatch, "plain", "sliding_window", "logits_soft_cap", "all")
    cells = harness.check_backend("picky", dtypes=["float32"], verbose=False)
    assert {cell.result.split(":")[0] for cell in cells} == {"ok", "refused"}
    assert all(("cap" in c.feature or "all" in c.feature) == (c.result != "ok") for c in cells)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewSpec(AttentionSpec):
    """A spec of tomorrow, with an option that no backend of today knows."""

    temperature: float = 1.0


def arrays_of(framework):
    call = good_call()[:3]
    return call if framework is Framework.JAX else (*to_torch(call[:2], copy=True), call[2])


@pytest.mark.parametrize("framework", Framework)
def test_an_option_that_nobody_knows_is_refused_by_all(framework):
    attend, ask = {
        Framework.JAX: (paged_attention, explain),
        Framework.TORCH: (pagedattn_torch.paged_attention, pagedattn_torch.explain),
    }[framework]
    arrays, spec = arrays_of(framework), NewSpec(temperature=0.5)
    explanation = ask(*arrays, spec)
    assert set(explanation) == set(registry.names(framework))
    usable = [name for name, reasons in ask(*arrays).items() if not reasons]
    assert usable
    for name in usable:
        assert "temperature" in explanation[name][0]
        with pytest.raises(UnsupportedError, match="temperature"):
            attend(*arrays, spec, backend=name)
    assert explanation.choice is None
    with pytest.raises(UnsupportedError, match="temperature"):
        attend(*arrays, spec)
    assert ask(*arrays, NewSpec()).choice is not None  # left at its default, it asks for nothing


def test_a_bias_of_an_option_that_nobody_knows_is_refused():
    positions = np.arange(2)
    with pytest.raises(UnsupportedError, match="temperature"):
        attention_bias(positions, positions, NewSpec(temperature=0.5))
    assert attention_bias(positions, positions, NewSpec()).shape == (2, 2)


def test_a_backend_object_is_refused_by_its_allow_list():
    ran = []
    backend = Backend("mine", frozenset({"scale"}), lambda *arguments: ran.append(arguments))
    with pytest.raises(UnsupportedError, match=r"mine.*return_lse"):
        paged_attention(*good_call(), backend=backend, return_lse=True)
    assert not ran


def test_every_built_in_backend_is_known_to_both_frameworks_where_it_exists():
    assert registry.names(Framework.JAX)[: len(registry.BUILT_IN)] == tuple(registry.BUILT_IN)
    assert set(registry.names(Framework.TORCH)) >= {"triton", "xformers", "sdpa", "ipex"}


def keep(monkeypatch, *features):
    fewer = {feature: harness.OPTIONS[feature] for feature in features}
    monkeypatch.setattr(harness, "OPTIONS", fewer)


def test_check_backend_fails_a_wrong_backend(monkeypatch):
    """The harness itself: a backend that ignores the window does not pass."""

    def forgetful(query, cache, batch, spec, **kwargs):
        return paged_attention(
            query, cache, batch, dataclasses.replace(spec, sliding_window=None), **kwargs
        )

    monkeypatch.setattr(running, "paged_attention", forgetful)
    monkeypatch.setattr(harness, "PHASES", {"mixed": harness.PHASES["mixed"]})
    keep(monkeypatch, "plain", "sliding_window")
    with pytest.raises(AssertionError, match=r"cells failed(.|\n)*sliding_window"):
        harness.check_backend("xla", dtypes=["float32"], verbose=False)


@pytest.mark.parametrize("reason", ["no logits_soft_cap", "just because"])
def test_check_backend_wants_reasons_that_name_the_feature(monkeypatch, reason):
    def picky(query, cache, batch, spec, **kwargs):
        if spec.logits_soft_cap:
            raise UnsupportedError(reason)
        return paged_attention(query, cache, batch, spec, **kwargs)

    monkeypatch.setattr(running, "paged_attention", picky)
    monkeypatch.setattr(harness, "PHASES", {"mixed": harness.PHASES["mixed"]})
    keep(monkeypatch, "plain", "logits_soft_cap")
    if reason == "just because":
        listed = "names no feature.*one of logits_soft_cap, mixed, float32, num_heads.*: just"
        with pytest.raises(AssertionError, match=listed):
            harness.check_backend("xla", dtypes=["float32"], verbose=False)
    else:
        cells = harness.check_backend("xla", dtypes=["float32"], verbose=False)
        assert sum(cell.result.startswith("refused") for cell in cells) == 1


WRONG_RESULTS = {
    "out must be float32[26, 4, 16], got float32[4, 26, 16]": lambda out, lse: (
        out.swapaxes(0, 1),
        lse,
    ),
    "out must be float32[26, 4, 16], got float32[26, 64]": lambda out, lse: (
        out.reshape(26, 64),
        lse,
    ),
    "out must be float32[26, 4, 16], got bfloat16[26, 4, 16]": lambda out, lse: (
        out.astype("bfloat16"),
        lse,
    ),
    "lse must be float32[26, 4], got float32[4, 26]": lambda out, lse: (out, lse.T),
    "lse must be float32[26, 4], got float16[26, 4]": lambda out, lse: (out, lse.astype("float16")),
    "out must be float32[26, 4, 16], got None": lambda _, lse: (None, lse),
    "run must return (out, lse), got ": lambda out, _: out,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("text", WRONG_RESULTS)
def test_check_backend_compares_shapes_first(monkeypatch, text, jit):
    """Also of what is done around a backend with its results: sinks, scales."""
    monkeypatch.setattr(harness, "PHASES", {"mixed": harness.PHASES["mixed"]})
    keep(monkeypatch, "plain", "sinks", "cache_dtype")

    def run(*arrays, **options):
        return WRONG_RESULTS[text](*xla.BACKEND.run(*arrays, **options))

    wrong = dataclasses.replace(xla.BACKEND, name="wrong", run=run)
    with pytest.raises(AssertionError) as raised:
        harness.check_backend(wrong, dtypes=["float32"], jit=jit, verbose=False)
    assert "3 of 3 cells failed" in str(raised.value)
    assert str(raised.value).count(text) == 3


@pytest.mark.parametrize("framework", [f for f in Framework if can_load("triton", f)])
def test_the_tests_let_triton_refuse_only_what_it_does_not_know(framework):
    """Else what it has learnt would go on to be skipped."""
    assert not set(REFUSING["triton"]) & registry.load("triton", framework).supports


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the rule is about CPUs")
def test_torch_is_called_only_for_work_that_is_worth_it():
    """By name it runs anything; by choice, what xla would be slower at."""
    small = random_problem([40], [40], AttentionSpec())
    large = random_problem([64] * 4, [1000] * 4, small.spec, num_heads=8, head_dim=64)
    for problem, best in ((small, "xla"), (large, "sdpa")):
        call = (jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec)
        chosen = "numba" if can_load("numba") else best
        assert select_backend(*call) == explain(*call).choice == chosen
        assert explain(*call)["sdpa"] == []
        passed_over = explain(*call).passed_over
        assert chosen == "numba" or ("sdpa" in passed_over) == (best == "xla")


def test_a_backend_object_is_held_to_its_device_and_its_packages():
    cudnn = registry.load("cudnn")
    if jax.default_backend() != "gpu":
        with pytest.raises(UnsupportedError, match="cudnn runs on cuda"):
            paged_attention(*good_call(), backend=cudnn)
    lacking = dataclasses.replace(xla.BACKEND, name="lacking", missing=lambda: ["pip install it"])
    with pytest.raises(BackendUnavailableError, match="pip install it"):
        paged_attention(*good_call(), backend=lacking)


@pytest.mark.parametrize(
    ("place", "told"), [("broken:BACKEND", "raised ZeroDivisionError"), ("json:dumps", "is no")]
)
def test_a_broken_backend_of_a_third_party_stops_no_other(tmp_path, monkeypatch, place, told):
    runs = tmp_path / "runs"
    count = f"with open({str(runs)!r}, 'a') as file:\n    file.write('.')\n"
    (tmp_path / "broken.py").write_text(count + "1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("broken", place, Framework.JAX.value)
    monkeypatch.setattr(registry, "_third_parties", lambda framework: {"broken": entry})
    registry.tried.cache_clear()
    assert told in explain(*good_call()[:3])["broken"][0]
    assert paged_attention(*good_call()).shape
    with pytest.raises(BackendUnavailableError, match=told):
        paged_attention(*good_call(), backend="broken")
    if "broken" in place:  # what failed once is not imported again
        assert runs.read_text() == "."
    monkeypatch.undo()
    registry.tried.cache_clear()
