"""Rounds in which all contenders take turns, and the tables that come of them."""

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from peers import CONTENDERS, OURS, REFERENCE, ContenderError, Remote, load_packed_product
from workloads import MAX_LENGTH, read_config

# Smallest cosine with the reference, over all texts, that counts as the same features.
SAME = {"float32": 0.9999, "bfloat16": 0.99}
PACKAGES = "torch transformers sentence-transformers openvino optimum-intel skrub embetter".split()


def parse_options(description, rounds=5, **more):
    """Read ``--rounds``, ``--quick``, ``--model`` and what a script has besides."""
    sys.stdout.reconfigure(line_buffering=True)  # also in a file, one sees how far it is
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, help=f"default {rounds}; with --quick 3")
    parser.add_argument("--quick", action="store_true", help="few texts: a look, not a measurement")
    parser.add_argument("--model", help="folder of a BERT; default the packaged all-MiniLM-L6-v2")
    for name, help_ in more.items():
        parser.add_argument(f"--{name}", help=help_)
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else rounds)
    return options


def print_machine():
    import torch

    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} processors, "
        f"{torch.backends.cpu.get_cpu_capability()}; Python {platform.python_version()}"
    )
    print(", ".join(f"{name} {_version(name)}" for name in PACKAGES))


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


class Group:
    """Contenders on one model that take turns, and the roof of the machine for it.

    Parameters
    ----------
    folder : str
        The model.
    names : sequence of str
        Of ``CONTENDERS``. One that cannot be loaded is left out, and so are all of a precision
        that the processor has no products in; `skipped` says why.
    """

    def __init__(self, folder, names=CONTENDERS):
        self.config = read_config(folder)
        self.skipped = {}
        self.remotes = {}
        sizes = self.config["hidden_size"], self.config["intermediate_size"]
        self.roofs = _load_roofs(*sizes)
        self.best = dict.fromkeys(self.roofs, 0.0)  # of every round so far, in FLOP/s
        for name in names:
            load, dtype = CONTENDERS[name]
            if dtype in self.roofs:
                self.remotes[name] = Remote(load, folder, MAX_LENGTH, dtype)
            else:
                self.skipped[name] = f"this processor has no arithmetic in {dtype}"
        for name, remote in list(self.remotes.items()):
            try:
                remote.wait_until_loaded()
            except ContenderError as error:
                self._leave_out(name, str(error))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for remote in [*self.remotes.values(), *self.roofs.values()]:
            remote.stop()

    def compare(self, texts):
        """Check that all give the same features of all texts; this also warms them up.

        Returns ``{name: (smallest cosine, largest absolute difference)}``. A contender whose
        features are others is left out, for its time would mean nothing.
        """
        reference = np.asarray(self.remotes[REFERENCE].call(texts))
        found = {}
        for name in list(self.remotes):
            try:
                features = np.asarray(self.remotes[name].call(texts))
            except ContenderError as error:
                self._leave_out(name, str(error))
                continue
            found[name] = smallest_cosine(features, reference), np.abs(features - reference).max()
            if not found[name][0] > SAME[CONTENDERS[name][1]]:
                self._leave_out(name, f"other features: cosine {found[name][0]:.4f}")
        return found

    def _leave_out(self, name, reason):
        if name in OURS.values():
            raise SystemExit(f"{name}: {reason}")
        self.skipped[name] = reason
        self.remotes.pop(name).stop()

    def take_turns(self, calls, n_rounds):
        """Time the same calls of every contender, round after round.

        The order moves on by one from round to round, so that nobody always runs after the same
        other one. The roof is measured in every round too.

        Returns
        -------
        seconds : dict of ndarray of shape (n_rounds, n_calls)
        roofs : dict of float
            FLOP/s for each precision: the best of all rounds so far.
        """
        names = list(self.remotes)
        seconds = {name: [] for name in names}
        for number in range(n_rounds):
            for dtype, remote in self.roofs.items():
                self.best[dtype] = max(self.best[dtype], remote.call())
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name in self.remotes:
                    self._time(name, calls, seconds)
        return {name: np.array(rounds) for name, rounds in seconds.items()}, dict(self.best)

    def _time(self, name, calls, seconds):
        try:
            seconds[name].append(self.remotes[name].time(calls))
        except ContenderError as error:
            self._leave_out(name, str(error))
            del seconds[name]


def _load_roofs(hidden_size, intermediate_size):
    """Return what measures the roof, by precision: of those that this processor computes in."""
    roofs = {
        dtype: Remote(load_packed_product, hidden_size, intermediate_size, dtype) for dtype in OURS
    }
    for dtype, remote in list(roofs.items()):
        try:
            remote.wait_until_loaded()
        except ContenderError:
            if dtype == "float32":  # not a matter of the processor
                raise
            roofs.pop(dtype).stop()
    return roofs


def smallest_cosine(a, b):
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(((a * b).sum(axis=1) / lengths).min())


def print_results(group, seconds, agreement, roofs=None, flops=0.0, unit="s"):
    """Print one table: a row per contender, one figure per round in `seconds`.

    "x ours" is the median over the rounds of the ratio within a round: how many times the time of
    the library in float32, and in bfloat16.
    """
    scale = {"s": 1.0, "ms": 1e3}[unit]
    titles = [f"median {unit}", "min", "max", "x ours f32", "x ours bf16", "of roof"]
    print(
        f"{'':30s}"
        + "".join(f"{title:>12s}" for title in titles)
        + f"{'cosine':>10s}{'max diff':>10s}"
    )
    for name, rounds in seconds.items():
        row = [f"{scale * value:12.4g}" for value in (np.median(rounds), *_ends(rounds))]
        row += [f"{ratio(seconds, name, ours):12.2f}" for ours in OURS.values()]
        roof = roofs[CONTENDERS[name][1]] if roofs else np.nan
        row.append(f"{flops / np.median(rounds) / roof:12.0%}" if roofs else f"{'':12s}")
        cosine, difference = agreement[name]
        print(f"{name:30s}" + "".join(row) + f"{cosine:10.5f}{difference:10.1e}")
    for name, reason in group.skipped.items():
        print(f"{name:30s}  skipped: {reason}")


def _ends(values):
    return np.min(values), np.max(values)


def ratio(seconds, name, ours):
    """How many times the time of `ours` a contender takes; nan if one is missing."""
    if name not in seconds or ours not in seconds:
        return np.nan
    return float(np.median(seconds[name] / seconds[ours]))


def print_targets(seconds, targets, roofs=None, flops=0.0):
    """Say for each ``(ours, at least, times faster than whom)`` whether it is reached.

    Also how many times faster something would be that did all its arithmetic at the roof: on a
    processor whose widest instructions are not much faster than the others, that is not much.
    """
    for ours, least, peer in targets:
        if ours not in seconds:
            continue
        got = ratio(seconds, peer, ours)
        line = f"  {ours} >= {least} x faster than {peer.strip()}: {got:.2f}"
        if roofs and peer in seconds:
            at_roof = np.median(seconds[peer]) * roofs[CONTENDERS[ours][1]] / flops
            line += f" (the roof is at {at_roof:.2f})"
        print(f"{line}, {_verdict(got, least)}")


def print_roof_targets(seconds, targets, roofs, flops):
    for ours, least in targets:
        if ours not in seconds:
            continue
        got = flops / np.median(seconds[ours]) / roofs[CONTENDERS[ours][1]]
        print(f"  {ours} >= {least:.0%} of the roof: {got:.0%}, {_verdict(got, least)}")


def _verdict(got, least):
    return "no figure" if np.isnan(got) else "reached" if got >= least else "MISSED"
