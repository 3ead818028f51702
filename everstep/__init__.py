"""The face of Everstep: the command (``cli``), the client (``client``), and the common language (``protocol``)."""
