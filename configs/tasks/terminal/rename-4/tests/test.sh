# One file is left, with the new name and the old content.
[ "$(ls)" = out.txt ] && [ "$(cat out.txt)" = red ] || exit 1
