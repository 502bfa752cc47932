"""What failures cost: the interval at which to save, and the share of the time that is kept."""

import math
import random


def best_interval(stall: float, mtbf: float) -> float:
    """Seconds of work between saves that lose the least time.

    Young's square root of 2 x stall x MTBF with the higher orders of Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).

    Args:
        stall: Seconds for which a save stops the work.
        mtbf: Mean seconds between failures of the whole job.
    """
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def kept(interval: float, stall: float, written: float, restart: float, mtbf: float) -> float:
    """The share of the time that is work which lasts, by Daly's complete model.

    A save that goes on beside the work for `written` seconds is of no use before it is over: what
    was done meanwhile is lost too, as if the restart took that much longer.

    Args:
        interval: Seconds of work between saves.
        stall: Seconds for which a save stops the work.
        written: Seconds until it can be gone on from.
        restart: Seconds from a failure to the next step.
        mtbf: Mean seconds between failures of the whole job.
    """
    if math.isinf(mtbf):
        return interval / (interval + stall)
    again = mtbf * math.exp((restart + written) / mtbf)
    return interval / (again * math.expm1((interval + stall) / mtbf))


def played(
    interval: float,
    stall: float,
    written: float,
    restart: float,
    mtbf: float,
    failures: int = 20_000,
    seed: int = 0,
) -> float:
    """What `kept` says, from so many failures drawn at random; a restart may fail as well."""
    draw = random.Random(seed)
    cycle = interval + stall
    worked, passed = 0.0, 0.0
    for _ in range(failures):
        until = draw.expovariate(1 / mtbf)
        passed += until
        alive = until - restart
        if alive > 0:
            # Saves that were begun, and were also through, before the end of this life.
            worked += interval * max(0, math.floor((alive - written) / cycle))
    return worked / passed
