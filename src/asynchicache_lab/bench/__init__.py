"""The benches and their reports. Each bench compares with a limit measured in the same run."""
