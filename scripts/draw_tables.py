"""Write the recovery tables into docs/recovery.md anew: run it after a change of a table."""

from pathlib import Path

from everstep.recovery.core import diagram

PAGE = Path(__file__).parent.parent / "docs" / "recovery.md"

if __name__ == "__main__":
    PAGE.write_text(diagram.fill(PAGE.read_text()))
    print(f"{PAGE} written")
