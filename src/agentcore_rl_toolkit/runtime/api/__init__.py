"""AWS's quotas, and faults to inject."""
