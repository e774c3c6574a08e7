"""What measures: calls, peer processes, the gate, the table and the results file. torch only, apart from pytest."""
