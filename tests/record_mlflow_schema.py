"""Record the schema of MLflow's SQLite store: ``python tests/record_mlflow_schema.py``.

Run it when `constraints.txt` names another version of MLflow. It writes `rlox/tracking/mlflow_schema.sql` from a store
that the installed MLflow has created; tests/test_tracking.py compares the two.
"""

import sqlite3
import sys
import tempfile
from pathlib import Path

PATH = Path(__file__).parents[1] / "rlox" / "tracking" / "mlflow_schema.sql"


def schema() -> str:
    """The schema of a new store of the installed MLflow, as SQL."""
    import mlflow
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "mlflow.db")
        MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
        connection = sqlite3.connect(database)
        (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        # MLflow creates indexes in varying order.
        order = "ORDER BY type = 'table' DESC, type, name"
        parts = [sql for (sql,) in connection.execute(f"SELECT sql FROM sqlite_master WHERE sql IS NOT NULL {order}")]
        connection.close()
    head = f"-- The store of MLflow {mlflow.__version__}. Written by tests/record_mlflow_schema.py."
    return "\n".join([head, f"-- revision: {revision}", *(f"{sql.strip()};" for sql in parts), ""])


if __name__ == "__main__":
    PATH.write_text(schema(), encoding="utf-8")
    sys.exit(0)
