"""Summarize the comparisons of a proof, and write and format its certificate."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.certificate import Certificate, Row
from titanlite.config.files import write_output

if TYPE_CHECKING:
    from titanlite.prove.checks import Check


def summarize_checks(checks: Sequence[Check]) -> list[Row]:
    """Summarize checks in the rows of a certificate, with one row per kind of check.

    Each row shows the check with the largest error relative to its tolerance.
    """
    checks_by_name: dict[str, list[Check]] = {}
    for check in checks:
        checks_by_name.setdefault(check.name, []).append(check)

    rows = []
    for name, group in checks_by_name.items():
        worst = max(group, key=_severity)
        row = Row(
            check=name,
            # JSON has no infinity, so write the largest number instead.
            error=worst.error if math.isfinite(worst.error) else sys.float_info.max,
            tolerance=worst.tolerance,
            worst=f"step {worst.step}, {worst.subject}",
            count=len(group),
            passed=all(check.has_passed for check in group),
        )
        rows.append(row)
    return rows


def _severity(check: Check) -> tuple[bool, float]:
    """Return a sort key that is largest for the worst check.

    Failed checks rank above passed checks. Otherwise, the error relative to the tolerance decides.
    """
    ratio = check.error / check.tolerance if check.tolerance else check.error
    return not check.has_passed, ratio


def describe_first_difference(checks: Sequence[Check]) -> str:
    """Describe the first failed check in one sentence. If all checks passed, return ""."""
    failed = [check for check in checks if not check.has_passed]
    if not failed:
        return ""
    first = failed[0]
    size = "not bitwise equal"
    if first.tolerance:
        size = f"error {first.error:.2g}, tolerance {first.tolerance:.2g}"
    hint = f": {first.hint}" if first.hint else ""
    return f"First difference at step {first.step}: {first.name} of {first.subject} ({size}){hint}."


def write_certificate(certificate: Certificate, folder: Path) -> Path:
    """Write a certificate to a new JSON file in `folder` and return the path of the file.

    The file name contains the time, for example "certificate-20260131-120000.json".
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(certificate.time))
    path = folder / f"certificate-{moment}.json"
    write_output(path, f"{certificate.model_dump_json(indent=2)}\n".encode())
    return path


def format_summary(certificate: Certificate) -> str:
    """Format the header of the output of `titanlite prove`, as a few lines of text.

    It lists the layout, precision and device, and how the trained small job differs from the
    original job.
    """
    layout = " x ".join(f"{name} {size}" for name, size in certificate.layout.items() if size > 1)
    lines = [
        f"Layout: {layout or 'one rank'}; {certificate.precision} on {certificate.device}",
        f"Updates compared with: {certificate.optimizer_reference}",
        "Shrunk:",
        *(f"  {change}" for change in certificate.changes),
    ]
    if certificate.not_kept:
        lines += ["Not kept:", *(f"  {text}" for text in certificate.not_kept)]
    return "\n".join(lines)


def table_rows(certificate: Certificate) -> list[tuple[str, ...]]:
    """Convert a certificate to the cells of the table that `titanlite prove` prints.

    Returns:
        For each kind of check: name, count, error, tolerance, result and the worst comparison.
    """
    rows = []
    for row in certificate.rows:
        is_bitwise = row.tolerance == 0
        error = f"{row.error:.1e}" if row.error else "0"
        tolerance = "bitwise" if is_bitwise else f"{row.tolerance:.1e}"
        result = "ok" if row.passed else "DIFFERS"
        rows.append((row.check, str(row.count), error, tolerance, result, row.worst))
    return rows
