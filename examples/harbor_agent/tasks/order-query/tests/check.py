"""Run the query on two databases that this file creates. Write a reward.json with the parts."""

import json
import pathlib
import sqlite3

TABLES = """CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, placed TEXT, cents INTEGER, cancelled INTEGER);"""
CASES = {
    "known": (
        ["Ada", "Ben", "Cleo", "Dan", "Eve"],
        [(1, 1200, 0), (1, 300, 1), (2, 500, 0), (2, 700, 0), (3, 900, 1), (5, 4500, 0)],
        [("Eve", 1, 4500), ("Ada", 1, 1200), ("Ben", 2, 1200), ("Cleo", 0, 0), ("Dan", 0, 0)],
    ),
    "other": (
        ["Zoe", "Yan", "Xi"],
        [(3, 1, 0), (3, 1, 0), (2, 2, 0), (1, 9, 1)],
        [("Xi", 2, 2), ("Yan", 1, 2), ("Zoe", 0, 0)],
    ),
}


def right(names, orders, expected):
    db = sqlite3.connect(":memory:")
    db.executescript(TABLES)
    db.executemany("INSERT INTO customers (name) VALUES (?)", [(name,) for name in names])
    db.executemany("INSERT INTO orders (customer, cents, cancelled) VALUES (?, ?, ?)", orders)
    try:
        cursor = db.execute(pathlib.Path("/app/query.sql").read_text())
        columns = [column[0] for column in cursor.description or ()]
        return columns == ["name", "orders", "cents"] and cursor.fetchall() == expected
    except (OSError, ValueError, sqlite3.Error) as e:
        print(e)
        return False


parts = {name: float(right(*case)) for name, case in CASES.items()}
result = {"reward": float(all(parts.values())), **parts}
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps(result))
print(result)
