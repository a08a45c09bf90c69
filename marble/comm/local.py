"""Virtual ranks: the programs of all ranks, run in turns in one process. Any number of ranks on one CPU or GPU."""

from __future__ import annotations

from collections.abc import Mapping

from marble.comm.transport import Arrive, Program, Request, Result, Start


def run_together(programs: Mapping[int, Program[Result]]) -> dict[int, Result]:
    """Run the programs of all ranks to their end.

    Targets are filled with NaN when a transfer starts and with the data when it is waited for, as late as any real
    transport may deliver: a program that reads too early, or changes a source too early, gives a wrong answer.

    Args:
        programs: one program per rank.

    Returns:
        The result of each program by rank.

    Raises:
        RuntimeError: if the ranks do not ask for the same thing at the same time.
    """
    results: dict[int, Result] = {}
    started: dict[int, Start] = {}
    while len(results) < len(programs):
        requests: dict[int, Request] = {}
        for rank, program in programs.items():
            try:
                requests[rank] = next(program)
            except StopIteration as stop:
                results[rank] = stop.value
        if requests and results:
            raise RuntimeError(f"ranks {sorted(results)} ended while ranks {sorted(requests)} go on")
        starts = {rank: request for rank, request in requests.items() if isinstance(request, Start)}
        if starts and len(starts) < len(requests):
            raise RuntimeError(f"ranks {sorted(starts)} start transfers while the others wait for theirs")
        if starts:
            started = starts
            _check_partners(started)
            for rank, start in started.items():
                for transfer in start.transfers:
                    if transfer.target == rank:
                        start.view(transfer.dst).fill_(float("nan"))
        elif requests:
            assert all(isinstance(request, Arrive) for request in requests.values())
            _deliver(started)
    return results


def _deliver(started: Mapping[int, Start]) -> None:
    for rank, start in started.items():
        for transfer in start.transfers:
            if transfer.source == rank:
                target = started[transfer.target].view(transfer.dst)
                target.copy_(start.view(transfer.src))


def _check_partners(started: Mapping[int, Start]) -> None:
    for rank, start in started.items():
        for transfer in start.transfers:
            other = transfer.target if transfer.source == rank else transfer.source
            if transfer not in started[other].transfers:
                raise RuntimeError(f"rank {rank} lists {transfer}, rank {other} does not")
