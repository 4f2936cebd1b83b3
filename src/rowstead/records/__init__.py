"""What a run leaves behind: its folder, events, timers and samples of what it used. No torch here."""
