"""Readers of the files that trackers write, independent of the trackers' own readers."""

import json
import struct
from pathlib import Path


def wandb_records(path):
    """The records of a .wandb file: a LevelDB log (32 KiB blocks, 7-byte chunk headers) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, position, whole = Path(path).read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            message = Message()
            message.ParseFromString(whole)
            yield message
            whole = b""


def wandb_history(run):
    """The rows of the run's only offline file, and all its records."""
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    return wandb_rows(path)


def wandb_rows(path):
    """The rows of a .wandb file, and all its records."""
    records = list(wandb_records(path))
    history = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    return history, records
