"""``python -m leyline_lab.claims``: ``leyline claims`` where only the engine is installed."""

from leyline_lab.commands.claims import app

if __name__ == "__main__":
    app()
