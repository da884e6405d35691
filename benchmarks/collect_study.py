"""Takes the results of `blockgate reproduce` into the repository: what is small, and no checkpoints.

    python benchmarks/collect_study.py runs/reproduce

copies, for each scale, every arm's result.json, the tables, times and pictures into benchmarks/study/SCALE.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

STUDY = Path(__file__).parent / "study"


def collect(runs: Path, study: Path = STUDY) -> list[Path]:
    """Copies, and returns what was written."""
    written = []
    for result in sorted(runs.glob("*/*/seed-*/result.json")):
        scale, arm, seed = result.relative_to(runs).parts[:3]
        facts = json.loads(result.read_text())
        # Where a run lay and where its data came from is of no use elsewhere.
        facts["run"] |= {"output": f"runs/reproduce/{scale}/{arm}/{seed}", "data_dir": None}
        if facts["run"].get("start"):
            facts["run"]["start"] = "runs/reproduce/" + "/".join(Path(facts["run"]["start"]).parts[-3:])
        target = study / scale / arm / f"{seed}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(facts) + "\n")
        written.append(target)
    for pattern in ("*/*.md", "*/*.png", "*/times-*.json", "*/figure2.json"):
        for file in sorted(runs.glob(pattern)):
            target = study / file.relative_to(runs)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            written.append(target)
    return written


if __name__ == "__main__":
    for file in collect(Path(sys.argv[1])):
        print(file.relative_to(STUDY.parent.parent))
