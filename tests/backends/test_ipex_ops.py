"""The extension is refused, not imported, beside a torch that it was not built for."""

from importlib.metadata import PackageNotFoundError

import pytest

torch = pytest.importorskip("torch")

from pagedattn import BackendUnavailableError
from pagedattn_torch.backends.ipex import operators as ipex_ops

PACKAGE = "intel_extension_for_pytorch"
FITTING = [("2.8.0", "2.8.0"), ("2.8.0+cpu", "2.8.10+xpu"), ("2.8.1", "2.8.0")]
UNFITTING = [("2.9.0", "2.8.0"), ("2.13.0+cpu", "2.8.0+cpu"), ("2.7.1", "2.8.0"), ("3.8.0", "2.8")]


def install(monkeypatch, ours, its):
    """Packages of these versions; importing one is an error."""
    versions = {"torch": ours, PACKAGE: its}

    def version(name):
        if versions[name] is None:
            raise PackageNotFoundError(name)
        return versions[name]

    def import_module(name):
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(ipex_ops, "find_spec", lambda name: object())
    monkeypatch.setattr(ipex_ops, "version", version)
    monkeypatch.setattr(ipex_ops.importlib, "import_module", import_module)


def operators():
    return ipex_ops.paged_operators.__wrapped__()


@pytest.mark.parametrize(("ours", "its"), UNFITTING)
def test_refused_before_the_import(monkeypatch, ours, its):
    install(monkeypatch, ours, its)
    with pytest.raises(BackendUnavailableError) as error:
        operators()
    for word in (PACKAGE, its, ours, "pip install"):
        assert word in str(error.value)


@pytest.mark.parametrize(("ours", "its"), FITTING)
def test_imported_where_releases_match(monkeypatch, ours, its):
    install(monkeypatch, ours, its)
    assert ipex_ops.why_unusable() == []
    with pytest.raises(AssertionError, match="was imported"):
        operators()


@pytest.mark.parametrize("unknown", ["torch", PACKAGE])
def test_a_package_without_a_version_is_refused(monkeypatch, unknown):
    versions = {"torch": "2.8.0", PACKAGE: "2.8.0"} | {unknown: None}
    install(monkeypatch, versions["torch"], versions[PACKAGE])
    with pytest.raises(BackendUnavailableError, match=f"no version of {unknown}"):
        operators()


def test_a_missing_package_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(ipex_ops, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=f"{PACKAGE} is not installed: pip install"):
        operators()
