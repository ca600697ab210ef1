"""The states of several replicas as that of one server."""

from collections import Counter
from collections.abc import Mapping

from pagedattn_serving.server.tickets import State


class Totals:
    """Adds up what replicas say of themselves.

    The counters of a replica that is gone stay in the sums: Prometheus takes a counter that falls
    for one that has started anew.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Mapping[str, float]] = {}

    def of(self, states: Mapping[str, State]) -> State:
        """The sums, with the number of replicas; all blocks, one replica's after another's.

        Args:
          states: of the replicas that there are now, by their names. There is a problem where all
            of them have one.
        """
        self._counters |= {name: state.counters for name, state in states.items()}
        each = list(states.values())
        problems = [state.problem for state in each]
        return State(
            problem=None if None in problems else next(iter(problems), "no replica answers"),
            owners=[owner for state in each for owner in state.owners],
            block_size=each[0].block_size if each else 1,
            gauges=_added([state.gauges for state in each]) | {"replicas": len(each)},
            counters=_added(list(self._counters.values())),
        )


def _added(numbers: list[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for of_one in numbers:
        total.update(of_one)
    return dict(total)
