"""``doctor``: the command that looks at the machine."""

from __future__ import annotations

from typing import Annotated

import typer

from extract_core.cli.common import AsJson, counted, emit, guarded, out, pure_stdout


@guarded
def doctor(
    root: Annotated[str | None, typer.Option("--root", help="Look at this dataset root's disk and spool too.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Import vLLM as the engine does (10 to 60 s).")] = False,
    as_json: AsJson = False,
) -> int:
    """Is this machine able to run? Versions, GPUs, memory, disks, stray engines; exit 1 when it is not."""
    from rich.text import Text

    from extract_core.doctor import Finding, examine

    if root is not None and "://" not in root:
        from extract_core.store.localfiles import local_folder

        local_folder(root, "--root")
    console = out()
    styles = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
    findings: list[Finding] = []
    with pure_stdout(as_json):
        for finding in examine(root, deep=deep):
            findings.append(finding)
            if as_json:
                continue
            mark, style = styles[finding.level]
            console.print(Text(mark, style=style) + Text(f"  {finding.name:<20}", style="bold") + Text(finding.text))
            if finding.fix:
                console.print(Text(f"{'':26}fix: {finding.fix}"))
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    if as_json:
        emit({"ok": not failed, "failed": failed, "warned": warned, "findings": [item.to_dict() for item in findings]})
    else:
        ending = "this machine cannot run yet" if failed else "this machine can run"
        console.print(Text(f"\n{ending}: {counted(failed, 'failure')}, {counted(warned, 'warning')}", style="bold"))
    return 1 if failed else 0
