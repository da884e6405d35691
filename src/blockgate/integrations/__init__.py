"""Callbacks for other people's trainers. Each file needs its own package, and is imported by name."""
