"""``python -m leyline_engine.lab``: ``leyline claims`` where only the engine is installed."""

from leyline_engine.lab.command import app

if __name__ == "__main__":
    app()
