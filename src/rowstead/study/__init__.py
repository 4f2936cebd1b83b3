"""Many runs: calibration, sweeps, quality studies and tuning."""
