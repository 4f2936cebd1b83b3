#!/bin/sh
# Starts a run, or resumes it from its last checkpoint where an earlier attempt has left one:
#   train.sh FOLDER RECIPE [OPTIONS OF THE FIRST START]
# LAUNCH is the command before `train`; for torchrun: LAUNCH="torchrun ... -m rowstead".
set -eu
folder=$1 recipe=$2
shift 2
if ls "$folder"/checkpoints/*/manifest.json >/dev/null 2>&1; then
  exec ${LAUNCH:-rowstead} train --resume "$folder"
fi
exec ${LAUNCH:-rowstead} train "$recipe" --out "$folder" "$@"
