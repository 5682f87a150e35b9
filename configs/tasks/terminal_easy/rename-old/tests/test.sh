# Only the new name is left, with the content.
[ ! -e old.txt ] && [ "$(cat new.txt)" = keep ] || exit 1
