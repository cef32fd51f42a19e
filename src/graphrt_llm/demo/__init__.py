"""The demo: one traffic, several graph policies, the same tokens; what each step ran, and why."""
