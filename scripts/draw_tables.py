"""Write the recovery tables into the documentation anew: run it after a change of a table."""

from pathlib import Path

from everstep.recovery.core import diagram

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    for name, parts in diagram.PAGES.items():
        page = ROOT / name
        page.write_text(diagram.fill(page.read_text(), parts))
        print(f"{page} written")
