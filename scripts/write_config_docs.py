"""Write docs/config.md from the schema."""

from pathlib import Path

from rolepool.config.describe import markdown

if __name__ == "__main__":
    page = Path(__file__).parent.parent / "docs" / "config.md"
    page.write_text(markdown(), encoding="utf-8")
    print(f"wrote {page}")
