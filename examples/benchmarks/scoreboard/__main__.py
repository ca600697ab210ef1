"""Asks the peers that are installed, and writes their answers and the page of the docs."""

import argparse
import datetime
import json
from pathlib import Path

from benchmarks.machine import processor, versions, write
from benchmarks.scoreboard.ask import PEERS, answers, up_to_date
from benchmarks.scoreboard.page import page
from benchmarks.scoreboard.peer import missing


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoreboard", description=__doc__)
    parser.add_argument("--json", type=Path, help="add the answers to this file")
    parser.add_argument("--page", type=Path, help="write this page from the file")
    which = f"of {', '.join(PEERS)}; without any, all"
    parser.add_argument("peers", nargs="*", choices=[*PEERS], metavar="PEER", help=which)
    asked = parser.parse_args()
    found = {"peers": {}}
    if asked.json and asked.json.exists():
        found = json.loads(asked.json.read_text())
    for name in asked.peers or PEERS:
        if reason := missing(PEERS[name]):
            print(f"{name} is left out: {reason}")
            continue
        print(name)
        found["peers"][name] = asked_now(name)
        write(asked.json, found)
    for name, about in found["peers"].items():
        about["rows"] = up_to_date(name, about["rows"])
    write(asked.json, found)
    if asked.page:
        asked.page.write_text(page(found))


def asked_now(name: str) -> dict:
    """A peer's answers, printed as they come, and what they were given on."""
    peer = PEERS[name]
    rows = answers(name, lambda cell, result: print(f"  {cell.row}, {cell.column}: {result}"))
    return {
        "machine": device() if peer.device == "cuda" else processor(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(peer.packages),
        "rows": rows,
    }


def device() -> str:
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
