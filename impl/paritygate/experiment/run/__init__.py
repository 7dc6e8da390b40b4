"""An open run: its directory, journal, service, progress; nothing here decides anything."""
