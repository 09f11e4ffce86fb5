"""Forward: config (blocks and budgets for a problem); device (timeline, entry, the roles that load and multiply), with
the roles softmax and correction and the lanes that they share; launch.
"""
