"""Synchronous training over several processes: process group, sharded tables, launch. No torch in `launch`."""
