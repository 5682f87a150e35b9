# One file is left, with the new name and the old content.
[ "$(ls)" = new.txt ] && [ "$(cat new.txt)" = gold ] || exit 1
