mv report.txt archive
