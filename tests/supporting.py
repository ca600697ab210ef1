"""The backends that have an option and those that lack it, as parameters of a test."""

from collections.abc import Iterator

import jax
import pytest

from pagedattn import BackendUnavailableError
from pagedattn._dispatch import registry
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.registry import Framework


def every() -> Iterator[tuple[Framework, str]]:
    for framework in Framework:
        for name in registry.names(framework):
            yield framework, name


def backends_with(option: str, but: tuple[str, ...] = ()) -> list:
    """The framework and the name of each backend that has an option, and runs here."""
    device = jax.default_backend().replace("gpu", "cuda")
    return [
        pytest.param(framework, name, id=f"{framework.name.lower()}-{name}")
        for framework, name in every()
        if name not in but
        and not isinstance(found := registry.tried(name, framework), str)
        and option in found.supports
        and not registry.wrong_device(name, device)
    ]


def backends_without(option: str) -> list:
    """The record of each backend that lacks an option, installed or not."""
    return [
        pytest.param(found, id=f"{framework.name.lower()}-{name}")
        for framework, name in every()
        if (found := known(name, framework)) and option not in found.supports
    ]


def known(name: str, framework: Framework) -> Backend | None:
    try:
        return registry.record(name, framework)
    except BackendUnavailableError:
        return None
