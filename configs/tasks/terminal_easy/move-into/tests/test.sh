# The file is in the directory and nowhere else.
[ -e archive/report.txt ] && [ ! -e report.txt ] || exit 1
