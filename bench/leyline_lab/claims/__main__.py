"""``python -m leyline_lab.claims``: ``leyline claims`` where only the engine is installed."""

from leyline_lab.claims.cli import app

if __name__ == "__main__":
    app()
