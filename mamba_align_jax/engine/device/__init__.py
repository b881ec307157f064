"""The jitted step: its arrays and their packing, the programs, and who launches them and reads their results."""
