-- parents: which jobs wait for which others, and how those ended. A look-up by child, or of the open ones by parent,
-- uses an index. The rows of a child are deleted when it enters its line, or is cancelled.
--> Which jobs wait for which others to end. ended_as is null while the parent has not.
-- rights: operator
create or replace view tallybook.parents as
select p.child_id, p.parent_id, p.place, p.ended_as from tallybook.parent p;
