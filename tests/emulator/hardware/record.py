"""Repeats every launch of the emulator on a GPU, compares, and keeps the books."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..build import EmulatorError
from ..module import Launch, Report, instruction_rows
from . import inexact
from .compare import Difference, Judge, both_nan, compare, loosely, within
from .job import LOAD, PLACE, RUN, Array, Job, Outcome

BITS, NANS, BOUNDS, SUMS, FAILS = (
    "bit for bit",
    "bit for bit but for NaN payloads",
    "within documented bounds",
    "within what other orders and approximations may change",
    "fail in the same way",
)
STAGES = {LOAD: "loading", PLACE: "placing memory", RUN: "running"}
DIFFERENT = "different, and may be: "
# What the driver says of a kernel that stops itself.
STOPS = {
    "trap": ("CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    "assertion failed": ("CUDA_ERROR_ASSERT",),
}


MOST_BYTES = 1 << 28  # of memory that is copied for a launch


class Runner(Protocol):
    name: str
    capability: int

    def run(self, job: Job) -> Outcome: ...


def unrunnable(ptx: str, capability: int) -> str:
    """Why a GPU cannot run PTX of this target; "" if it can."""
    found = re.search(r"^\.target\s+sm_(\d+)([af]?)", ptx, re.MULTILINE)
    if not found:
        return "PTX without a target"
    target, kind = int(found[1]), found[2]
    fits = {
        "": capability >= target,
        "a": capability == target,
        "f": capability // 10 == target // 10 and capability >= target,
    }
    return "" if fits[kind] else f"the GPU cannot run sm_{target}{kind}"


def may_hold_pointers(array: np.ndarray) -> bool:
    """Words of 64 bits, structs and raw bytes; not other numbers."""
    return array.dtype.kind == "V" or array.dtype.kind in "iu" and array.dtype.itemsize in (1, 8)


class Recorder:
    """`emulator.module.watch`: called before a launch, gives what is called after it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.compared: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.left_out_kernels: defaultdict[str, set[str]] = defaultdict(set)
        self.differences: list[str] = []
        self.notes: Counter[str] = Counter()
        self.forms_compared: set[str] = set()
        self.forms_missed: defaultdict[str, set[str]] = defaultdict(set)  # why launches of them were left out
        self.rows: dict[str, str] = {}  # by form

    def __call__(self, launch: Launch) -> Callable[[Report | EmulatorError], None]:
        if sum(x.nbytes for _, _, x in launch.arrays) > MOST_BYTES:
            return lambda result: self._too_large(launch, result)
        job = Job(
            launch.module.ptx, launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.parameters,
            [Array(at, name, x.tobytes(), dtype="" if x.dtype.kind == "V" else x.dtype.str,
                   pointers=may_hold_pointers(x)) for at, name, x in launch.arrays],
            [Array(at, name, launch.module.variable(name).tobytes()) for name, at, _ in launch.module.variables],
        )  # fmt: skip

        def finish(result: Report | EmulatorError) -> None:
            self._finish(launch, job, result)

        return finish

    def _too_large(self, launch: Launch, result: Report | EmulatorError) -> None:
        self.rows |= launch.module.rows
        forms = () if isinstance(result, EmulatorError) else set(result.forms)
        self._leave_out(launch.kernel, f"more than {MOST_BYTES >> 20} MiB of memory", forms)

    def _finish(self, launch: Launch, job: Job, result: Report | EmulatorError) -> None:
        if isinstance(result, EmulatorError):
            what = str(result).split("\n")[0].split(":")[0]
            if what in STOPS:
                return self._stops(job, what)
            return self._leave_out(job.kernel, f"the emulator refuses it: {what}", ())
        self.rows |= launch.module.rows
        forms = set(result.forms)
        why = launch.undefined or unrunnable(job.ptx, self.runner.capability)
        if why:
            return self._leave_out(job.kernel, why, forms)
        for one, (_, _, array) in zip(job.arrays, launch.arrays, strict=True):
            one.after = array.tobytes()
        for variable in job.variables:
            variable.after = launch.module.variable(variable.name).tobytes()
        outcome = self.runner.run(job)
        if result.printed:
            self.notes["what a kernel printed was not compared: threads print in any order"] += 1
        if outcome.lowered:
            self.notes["the PTX version was lowered to what the driver knows"] += 1
        if outcome.error in ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_NO_BINARY_FOR_GPU"):
            self._leave_out(job.kernel, f"the driver cannot compile it: {outcome.error}", forms)
        elif outcome.text.startswith("CUDA_ERROR_INVALID_VALUE: cuFuncSetAttribute"):
            self._leave_out(job.kernel, "the GPU has less shared memory", forms)
        elif outcome.error:
            self._differs(job, f"{STAGES[outcome.stage]}: {outcome.text}", forms)
        else:
            self._judge(job, forms, outcome)
        return None

    def _stops(self, job: Job, what: str) -> None:
        row = "trap " if what == "trap" else "call "
        why = unrunnable(job.ptx, self.runner.capability)
        if why:
            return self._leave_out(job.kernel, why, ())
        outcome = self.runner.run(job)
        if outcome.error not in STOPS[what]:
            return self._differs(job, f"{what} on the emulator, but the driver says {outcome.text or 'success'}", ())
        self.compared[FAILS] += 1
        self.rows[row.strip()] = row
        self.forms_compared.add(row.strip())
        return None

    def _judge(self, job: Job, forms: set[str], outcome: Outcome) -> None:
        if outcome.beside:
            return self._differs(job, f"the GPU wrote beside {', '.join(outcome.beside)}", forms)
        regions = [
            (f"{one.name} at {one.address:#x}", one.after, data, one.dtype)
            for one, data in zip(job.arrays, outcome.arrays, strict=True)
        ]
        for variable, data in zip(job.variables, outcome.variables, strict=True):
            if data is not None:
                regions.append((f"variable {variable.name}", variable.after, data, ""))
            elif variable.after != variable.before:
                return self._leave_out(job.kernel, "it writes a variable that the driver does not export", forms)
        computing = inexact.arithmetic(forms, self.rows)
        types, rows = inexact.float_types(computing), inexact.inexact(forms)
        levels: list[tuple[str, list[Judge]]] = [(BITS, []), (NANS, [both_nan])]
        if inexact.alone(computing, rows):
            levels.append((BOUNDS, [both_nan, *[within(row.bound) for row in rows if row.bound]]))
        elif rows:
            levels.append((SUMS, [both_nan, loosely(types)]))
        left: list[Difference] = []
        for level, judges in levels:
            left = [one for region in regions if (one := compare(*region, types, judges))]
            if not left:
                self.compared[level] += 1
                self.forms_compared |= forms
                return None
        why = inexact.undefined(forms)
        if why:
            return self._leave_out(job.kernel, f"{DIFFERENT}{why}", forms)
        return self._differs(job, "; ".join(map(str, left)), forms)

    def _leave_out(self, kernel: str, why: str, forms: set[str] | tuple[()]) -> None:
        self.left_out[why] += 1
        self.left_out_kernels[why].add(kernel)
        for form in forms:
            self.forms_missed[form].add(why)

    def _differs(self, job: Job, what: str, forms: set[str] | tuple[()]) -> None:
        for form in forms:
            self.forms_missed[form].add("different")
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        self.differences.append(f"{job.kernel}{f' in {test}' if test else ''}: {what}")

    # ---- the books

    def coverage(self) -> tuple[dict[str, str], dict[str, set[str]]]:
        """Rows of the instruction table that no compared launch executed, with the reason; and such forms by reason."""
        reached = {self.rows[form] for form in self.forms_compared}
        rows = {}
        for row in sorted(set(instruction_rows()) - reached):
            reasons = {why for form, found in self.forms_missed.items() if self.rows[form] == row for why in found}
            rows[row] = "; ".join(sorted(reasons)) or "no launch that succeeded executed it"
        by_reason: defaultdict[str, set[str]] = defaultdict(set)
        for form, found in self.forms_missed.items():
            if form not in self.forms_compared:
                by_reason["; ".join(sorted(found))].add(form)
        return rows, by_reason

    def summary(self) -> list[str]:
        total, left = sum(self.compared.values()), sum(self.left_out.values())
        rows, forms = self.coverage()
        known = len(instruction_rows())
        lines = [
            f"{self.runner.name}, sm_{self.runner.capability}: {total} launches compared, {left} left out, "
            f"{len(self.differences)} different"
        ]
        lines += [f"  {count} {how}" for how, count in self.compared.most_common()]
        for why, count in self.left_out.most_common():
            kernels = f" ({', '.join(sorted(self.left_out_kernels[why]))})" if why.startswith(DIFFERENT) else ""
            lines.append(f"  {count} left out: {why}{kernels}")
        lines += [f"  {count} times: {what}" for what, count in self.notes.most_common()]
        lines.append(f"instructions: {known - len(rows)} of {known} rows of the table compared")
        lines += [f"  not {row.strip()}: {why}" for row, why in rows.items()]
        missed = sum(map(len, forms.values()))
        lines.append(f"forms: {len(self.forms_compared)} compared, {missed} executed but not compared")
        lines += [f"  {why}: {', '.join(sorted(found))}" for why, found in sorted(forms.items())]
        lines += [f"different: {one}" for one in self.differences]
        return lines
