"""What every service shares: lifecycle, configuration, heartbeats, logging and telemetry."""
