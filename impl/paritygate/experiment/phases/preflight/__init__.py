"""What has to hold before a step is paid for."""
