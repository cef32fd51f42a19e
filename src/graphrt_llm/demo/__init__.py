"""The demo: one traffic under several graph policies, the same tokens, every miss explained."""
